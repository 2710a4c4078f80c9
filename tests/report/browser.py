"""A page in a real browser without a window: Chromium, driven by selenium, and never on a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from recollect._core.gains import Gain
from recollect._core.profiles import Profile
from recollect._report.html import write_html

LAPTOP, PHONE = (1280, 800), (390, 844)

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Page:
    """A page that is open in the browser."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver, self.folder = driver, folder

    def open(
        self,
        profile: Profile,
        *,
        against: Profile | None = None,
        gains: tuple[Gain, ...] = (),
        size: tuple[int, int] = LAPTOP,
        scheme: str = "light",
    ) -> Page:
        """Writes a report and shows it; what a test before this one did to the browser is gone."""
        return self.open_text(write_html(profile, against=against, gains=gains), size=size, scheme=scheme)

    def open_text(self, text: str, *, size: tuple[int, int] = LAPTOP, scheme: str = "light") -> Page:
        """Shows a page that was written."""
        file = self.folder / "report.html"
        file.write_text(text, encoding="utf-8")
        self.show(file.as_uri(), size=size, scheme=scheme)
        return self

    def show(self, address: str, *, size: tuple[int, int] = LAPTOP, scheme: str = "light") -> None:
        width, height = size
        is_phone = size == PHONE
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        self.command("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(address)
        self.wait_for_frame()

    def command(self, name: str, **parameters: Any) -> Any:
        return self.driver.execute_cdp_cmd(name, parameters)

    def script(self, code: str, *given: Any) -> Any:
        return self.driver.execute_script(code, *given)

    def wait_for_frame(self) -> None:
        """Waits until the page has drawn what it was last told: it draws in the frame after, and then lays out."""
        code = "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));"
        self.driver.execute_async_script(code)

    def all(self, selector: str) -> list[Any]:
        return cast("list[Any]", self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        found = self.all(selector)
        assert len(found) == 1, f"{len(found)} elements are {selector}"
        return found[0]

    def text(self, selector: str) -> str:
        return cast("str", self.one(selector).text)

    def column(self, selector: str) -> list[str]:
        """The texts of many elements in one call; one call each takes seconds where there are hundreds."""
        code = "return [...document.querySelectorAll(arguments[0])].map((element) => element.textContent)"
        return cast("list[str]", self.script(code, selector))

    def click(self, selector: str, *, text: str | None = None) -> None:
        elements = [element for element in self.all(selector) if text is None or element.text == text]
        assert len(elements) == 1, f"{len(elements)} elements are {selector} with {text!r}"
        self.script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", elements[0])
        elements[0].click()
        self.wait_for_frame()

    def unfold(self) -> None:
        """Shows identical layers one by one."""
        self.click("#fold input")

    def click_corner(self, selector: str) -> None:
        """Clicks where an element is not covered by those that it holds."""
        code = """
            arguments[0].scrollIntoView({block: 'center', behavior: 'instant'});
            const box = arguments[0].getBoundingClientRect();
            return [box.left + 8, box.top + 8];
        """
        x, y = self.script(code, self.one(selector))
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def press(self, selector: str, *keys: str) -> None:
        """Presses keys in the first element that is meant."""
        self.all(selector)[0].send_keys(*keys)
        self.wait_for_frame()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Moves the mouse to a place in the window, or presses or releases it there."""
        self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.wait_for_frame()

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        self.command("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y} for x, y in points])
        self.wait_for_frame()

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened, its own among them."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [request["request"]["url"] for request in sent if request["documentURL"].startswith("file:")]

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return cast("int", self.script("return document.documentElement.scrollWidth - innerWidth"))


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """A browser with an empty profile of its own, for as long as the block runs. Skips the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pages cannot be tried in a browser")
    chrome, driver_path = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chrome is None or driver_path is None:
        pytest.skip("no chromium and chromedriver on PATH: pages cannot be tried in a browser")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for flag in (*_FLAGS, f"--user-data-dir={folder / 'browser'}", "--window-size=1280,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    # With the driver's path given selenium does not look for one, which it would do on the network.
    driver = webdriver.Chrome(options=options, service=Service(executable_path=driver_path))
    try:
        driver.set_script_timeout(10)
        yield Page(driver, folder)
    finally:
        driver.quit()
