"""`make lab` in a real browser: a double click opens a notebook, all cells run, and saving leaves the .py as it was."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def wait_until(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(1)


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def course(tmp_path):
    """A copy of what `make lab` serves, with this Python as its .venv."""
    for name in ("notebooks", "tools"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        )
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


@pytest.fixture
def lab(course):
    """The address of a JupyterLab started by `make lab`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = f"--no-browser --ip=127.0.0.1 --port={port} --ServerApp.port_retries=0 --IdentityProvider.token="
    log = open(course / "lab.log", "w")
    command = ["make", "-o", ".venv/.course", "lab", f"ARGS={arguments}"]
    environment = os.environ | {"JUPYTER_CONFIG_DIR": str(course / "no-settings-of-the-user")}
    server = subprocess.Popen(command, cwd=course, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: listens(port) or server.poll() is not None, 120, "JupyterLab to start")
        assert server.poll() is None, (course / "lab.log").read_text()
        yield f"http://127.0.0.1:{port}/"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
        log.close()


@pytest.fixture
def page():
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield browser.new_page(viewport={"width": 1400, "height": 1000})
        browser.close()


def run_all_and_save(page, saved):
    """Run > Run All Cells; then save until the saved notebook has every cell run, or one has failed."""
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()

    def finished():
        page.keyboard.press("Control+s")
        if not saved.exists():
            return False
        try:
            notebook = nbformat.read(saved, as_version=4)
        except ValueError:  # Lab is writing it
            return False
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source]
        failed = [cell for cell in cells for output in cell.outputs if output.output_type == "error"]
        return failed or all(cell.execution_count for cell in cells)

    wait_until(finished, 300, "the notebook to run")


@pytest.mark.browser
def test_course_opens_runs_and_saves(course, lab, page):
    source = course / "notebooks/01_policy.py"
    before = source.read_bytes()
    page.goto(lab)
    page.locator(".jp-DirListing-item", has_text=source.name).dblclick()
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)

    saved = course / "build/notebooks/01_policy.ipynb"
    run_all_and_save(page, saved)
    outputs = [output for cell in nbformat.read(saved, as_version=4).cells for output in cell.get("outputs", [])]
    assert [output.evalue for output in outputs if output.output_type == "error"] == []
    assert not [output.text for output in outputs if output.get("name") == "stderr" and "Warning" in output.text]

    figure = page.locator(".jp-OutputArea-output img").first
    figure.scroll_into_view_if_needed()
    assert figure.is_visible() and figure.evaluate("image => image.naturalWidth") > 100
    (ROOT / "build").mkdir(exist_ok=True)
    page.screenshot(path=ROOT / "build/lab.png")

    assert source.read_bytes() == before
    assert [path.name for path in course.rglob("*.ipynb") if "build" not in path.parts] == []
