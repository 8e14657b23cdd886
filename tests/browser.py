"""A real browser for the tests of pages: the system's Chromium, without a network."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A Playwright browser. Skips the test where there is none, saying so; in CI it must be there."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        if os.environ.get("CI"):
            pytest.fail("CI must test pages in a browser: .ci/run installs chromium.")
        pytest.skip("no chromium on this machine: install it to test pages in a browser")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Any, path: Path, hash_: str = "", *, width: int = 1280) -> Iterator[Any]:
    """The page of a file. Afterwards: no error or warning on the console, and nothing was asked of any network."""
    context = browser.new_context(viewport={"width": width, "height": 900}, reduced_motion="reduce", locale="en-US")
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: (wrong.append(f"a script ran: {dialog.message}"), dialog.dismiss()))
    allowed = (path.as_uri(), "data:", "blob:")
    page.on("request", lambda request: None if request.url.startswith(allowed) else wrong.append(request.url))
    page.goto(path.as_uri() + hash_)
    try:
        yield page
    finally:
        context.close()
    assert wrong == []


def accessibility(page: Any) -> list[str]:
    """What axe-core finds wrong, WCAG 2.2 AA and its best practices."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['target']} {node.get('failureSummary', '')}" for one in found for node in one["nodes"]]


HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</SCRIPT ><svg/onload=alert(1)>",
    "<img src=x onerror=alert(1)>",
    '"><img src=x onerror=alert(1)>',
    "'><img src=x onerror=alert(1)>",
    '" onmouseover="alert(1)',
    "' onfocus='alert(1)' autofocus='",
    "javascript:alert(1)",
    "<a href=javascript:alert(1)>x</a>",
    "<iframe src=javascript:alert(1)>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<svg><script>alert(1)</script></svg>",
    "<svg onload=alert(1)>",
    "<body onload=alert(1)>",
    "<details open ontoggle=alert(1)>",
    "<input autofocus onfocus=alert(1)>",
    "<video><source onerror=alert(1)>",
    "<math><mi//xlink:href='data:x,<script>alert(1)</script>'>",
    "<object data='data:text/html,<script>alert(1)</script>'>",
    "<embed src='data:text/html,<script>alert(1)</script>'>",
    "<link rel=stylesheet href=data:text/css,x>",
    "<style>@import 'data:text/css,x';</style>",
    "<meta http-equiv=refresh content='0;url=javascript:alert(1)'>",
    "<base href='https://example.org/'>",
    "<form action=javascript:alert(1)><button>x</button></form>",
    "<!--<script>alert(1)</script>-->",
    "--><script>alert(1)</script>",
    "<![CDATA[<script>alert(1)</script>]]>",
    "]]><script>alert(1)</script>",
    "{{ 7*7 }}",
    "{% for x in y %}",
    "{{ ''.__class__.__mro__ }}",
    "${alert(1)}",
    "`;alert(1);`",
    "';alert(1);//",
    '";alert(1);//',
    "\\u003cscript\\u003ealert(1)\\u003c/script\\u003e",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;alert(1)&#60;/script&#62;",
    "<scr<script>ipt>alert(1)</scr</script>ipt>",
    "<ScRiPt>alert(1)</sCrIpT>",
    "<script\n>alert(1)</script\n>",
    "\u2028<script>alert(1)</script>\u2029",
    "\u202e<script>alert(1)</script>",
    "\ufeff<script>alert(1)</script>",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "<template><script>alert(1)</script></template>",
    "<textarea></textarea><script>alert(1)</script>",
    "<title></title><script>alert(1)</script>",
]
"""Fifty texts that would run a script in a page that took one of them for markup."""
