"""The page in a real browser: Debian's chromium, driven by Playwright; nothing but this machine is asked."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.conftest import REPOSITORY

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("needs Debian's chromium: make browser", allow_module_level=True)
pytest.importorskip("streamlit", reason="the page needs the extra 'app'")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, of the extra 'dev'")

CHROMIUM_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
STREAMLIT_FLAGS = (
    *("--server.headless", "true", "--browser.gatherUsageStats", "false"),
    *("--server.address", "127.0.0.1", "--server.fileWatcherType", "none"),
    *("--client.toolbarMode", "minimal"),
)
PATIENCE = 90.0  # seconds, on a loaded machine


@pytest.fixture
def address() -> Iterator[str]:
    """Where the page is served while the test runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", "app.py", *STREAMLIT_FLAGS, "--server.port", str(port)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(f"http://127.0.0.1:{port}/_stcore/health", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        assert server.poll() is None, "streamlit ended before it served the page"
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"no answer from {url} in {PATIENCE} s")


def test_run_is_pressed_and_answered(address: str, tmp_path: Path) -> None:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        page = browser.new_page(viewport={"width": 1400, "height": 2400})
        page.set_default_timeout(1e3 * PATIENCE)
        page.goto(address)
        page.get_by_label("Requests", exact=True).fill("200")
        page.get_by_role("button", name="Run", exact=True).click()
        answer = page.locator(".answer")
        answer.wait_for()
        page.locator(".js-plotly-plot").nth(3).wait_for()
        assert "chat: 200 of 200 requests completed" in answer.inner_text()
        assert "×/÷1.15 (68 %)" in page.locator(".basis").inner_text()
        assert page.get_by_test_id("stException").count() == 0
        page.screenshot(path=tmp_path / "page.png")
        browser.close()
    assert (tmp_path / "page.png").stat().st_size > 50_000
