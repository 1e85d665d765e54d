"""A headless Chromium, driven over its DevTools pipe: no driver to install. https://chromedevtools.github.io/devtools-protocol"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Page:
    """A page of a browser of its own; events: what the browser reported, in order."""

    def __init__(self, profile, width: int = 1280, height: int = 1000, dark: bool = False):
        (read, to_us), (from_us, write) = os.pipe(), os.pipe()
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (from_us, to_us)]  # clear of 3 and 4, where it listens
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--remote-debugging-pipe", "--disable-background-networking", f"--user-data-dir={profile}"]
        line = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(["bash", "-c", line, "-", CHROMIUM, *flags], pass_fds=theirs, **quiet)
        for fd in (*theirs, from_us, to_us):
            os.close(fd)
        self.read, self.write, self.session, self.count, self.left, self.events = read, write, None, 0, b"", []
        made = self.call("Target.createTarget", url="about:blank")
        self.session = self.call("Target.attachToTarget", targetId=made["targetId"], flatten=True)["sessionId"]
        for domain in ("Runtime", "Network", "Log", "Page"):
            self.call(f"{domain}.enable")
        self.look(width, height, dark)

    def call(self, method: str, seconds: float = 60, **params) -> dict:
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        os.write(
            self.write, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0"
        )
        until = time.monotonic() + seconds
        while True:
            while b"\0" not in self.left:
                if not select.select([self.read], [], [], max(0, until - time.monotonic()))[0]:
                    raise TimeoutError(f"{method}: no answer in {seconds} s")
                self.left += os.read(self.read, 1 << 20) or exec_ended()
            line, _, self.left = self.left.partition(b"\0")
            found = json.loads(line)
            if found.get("id") == self.count:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found["result"]
            self.events.append(found)

    def look(self, width: int, height: int, dark: bool):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, code: str):
        """The value of an expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{code}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, code: str, seconds: float = 60):
        """Waits until the expression is true."""
        end = time.monotonic() + seconds
        while not self.run(code):
            if time.monotonic() > end:
                raise TimeoutError(f"not true in {seconds} s: {code}")
            time.sleep(0.02)

    def screenshot(self, path, whole: bool = False):
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        try:
            self.session = None
            self.call("Browser.close", 10)
        except (OSError, TimeoutError):
            self.process.kill()
        self.process.wait()
        os.close(self.read)
        os.close(self.write)


def exec_ended():
    raise OSError("the browser has gone")
