"""Where a response ends: at a stop id, or at the token that completes a stop string."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stops:
    """ids: tokens that end a response; strings: texts that do, found in the decoded response however its tokens cut
    them. The token that ends it belongs to it, so that speculation and plain decoding stop at the same place."""

    ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    tokenizer: object = None

    def __post_init__(self):
        if any(not isinstance(text, str) or not text for text in self.strings):
            raise ValueError(f"stop_strings={list(self.strings)}: give texts that are not empty")
        if self.strings and self.tokenizer is None:
            raise ValueError("stop_strings need the target's tokenizer, and this target has none")

    def end(self, before: list[int], new: list[int]) -> int | None:
        """How many of the `new` tokens are kept where the response `before` + `new` ends in them, else None."""
        if not self.ids and not self.strings:
            return None
        end = next((i + 1 for i, token in enumerate(new) if token in self.ids), None)
        if not self.strings:
            return end
        # token by token, as plain decoding looks: half of a character decodes to what is gone when its rest has come
        return next((i for i in range(1, (end or len(new)) + 1) if self._in([*before, *new[:i]])), end)

    def _in(self, ids: list[int]) -> bool:
        text = self.tokenizer.decode(ids)
        return any(string in text for string in self.strings)
