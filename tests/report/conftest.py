"""One browser for all tests of pages."""

from collections.abc import Iterator

import pytest

from tests.report.browser import Page, open_browser


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("pages")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """The browser; whatever a test does with it, the page must say nothing in its console and ask for nothing."""
    yield browser
    assert browser.errors() == []
    assert set(browser.requests()) <= {(browser.folder / "report.html").as_uri(), "data:,"}
