"""A real browser, and the servers whose pages it opens."""
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCREENSHOTS = ROOT / "screenshots"  # not in git; CI keeps them
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync".split()
QUIET_LAB = {  # what would come between the test and the notebook
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}


@pytest.fixture(scope="session")
def browser():
    "Debian's Chromium, or Chrome."
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install -e '.[dev]'")
    if CHROMIUM is None: pytest.skip("there is no Chromium on this machine: apt install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def shoot():
    "Keeps a picture of a page."
    SCREENSHOTS.mkdir(exist_ok=True)
    return lambda target, name: target.screenshot(path=SCREENSHOTS / f"{name}.png")


@contextlib.contextmanager
def served(command, folder):
    "Run a server in a folder until the test is over; its log is shown when it does not start."
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / "server.log"
    settings = folder / "settings"
    for name, values in QUIET_LAB.items():
        file = settings / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTERLAB_SETTINGS_DIR": str(settings), "PYTHONIOENCODING": "utf-8"}
    with open(log, "w", encoding="utf-8") as written:
        server = subprocess.Popen([sys.executable, "-m", *command, f"--port={port}"], cwd=folder, env=environment, stdout=written, stderr=subprocess.STDOUT)
        try:
            for _ in range(400):
                if server.poll() is not None: raise RuntimeError(log.read_text(encoding="utf-8"))
                try: socket.create_connection(("127.0.0.1", port), timeout=5).close()
                except OSError: time.sleep(0.25)
                else: break
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try: server.wait(20)
            except subprocess.TimeoutExpired: server.kill()


@pytest.fixture(scope="session")
def serve(): return served


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    "JupyterLab in a folder with a copy of the notebooks; yields its address and the folder."
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "nbs", folder / "nbs", ignore=shutil.ignore_patterns("_*", ".*"))
    command = ["jupyter", "lab", "--no-browser", "--allow-root", "--IdentityProvider.token=", "--ServerApp.ip=127.0.0.1", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
    with served(command, folder) as address: yield address, folder
