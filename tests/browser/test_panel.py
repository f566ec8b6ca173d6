"""The dashboard in JupyterLab, used as a person would: with mouse and keyboard, in Chromium."""
import json
import re
import time
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parent.parent.parent / "nbs"
SECONDS = 1000  # Playwright counts milliseconds
# What the test adds at the end of the page: a cell to run while training goes on, and a panel that has to go wrong.
ANSWER = "import time; print('answered at', time.time())"
ANSWERED = re.compile(r"^answered at \d")
POISONED = """
poisoned_buffer = record(lane, scripted_policy(), steps=500, frame_shape=(3, 44, 44), progress=False)
poisoned_buffer._steps['reward'][:] = float('nan')
poisoned = Dashboard(play.replace(learning_rate=1e20, num_epochs=3), poisoned_buffer, folder='exported')
poisoned
"""


@pytest.fixture(scope="module")
def page(browser, lab):
    "The trainer's page after all its cells have run."
    address, folder = lab
    notebook = json.loads((folder / "nbs" / "03_trainer.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code": cell["outputs"] = []
    new = lambda name, source: {"cell_type": "code", "id": name, "metadata": {}, "source": source, "outputs": [], "execution_count": None}
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["id"] != "export"] + [new("poisoned", POISONED), new("answer", ANSWER)]
    (folder / "nbs" / "03_trainer.ipynb").write_text(json.dumps(notebook), encoding="utf-8")

    page = browser.new_page(viewport={"width": 1280, "height": 1600})
    page.set_default_timeout(60 * SECONDS)
    page.goto(f"{address}/lab/tree/nbs/03_trainer.ipynb?reset")
    page.locator('.jp-NotebookPanel [data-status="idle"]').first.wait_for()
    page.locator(".jp-Notebook").first.click(position={"x": 5, "y": 5})
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.get_by_text(ANSWERED).last.wait_for(timeout=150 * SECONDS)
    assert page.get_by_text("Traceback (most recent call last)").count() == 0
    yield page
    page.close()


class Panel:
    "One panel on a page, by what a person sees of it."
    def __init__(self, page, number):
        self.page = page
        self.box = page.locator(".jp-OutputArea-output", has=page.get_by_role("button", name="Train")).nth(number)
        self.box.scroll_into_view_if_needed()

    def button(self, name): return self.box.locator("button", has_text=re.compile(rf"^\s*{re.escape(name)}\s*$"))

    def press(self, name): self.button(name).click()

    def fill(self, label, value):
        field = self.box.get_by_label(label, exact=True)
        field.fill(str(value))
        field.press("Enter")

    def pictures(self): return [image.get_attribute("src") for image in self.box.locator("img").all()]

    def says(self, text, seconds=60):
        "Wait for a text, a regular expression, and return its match."
        found = self.box.get_by_text(re.compile(text)).first
        found.wait_for(timeout=seconds * SECONDS)
        return re.search(text, found.text_content().replace("\xa0", " "))

    def runs(self): return [text.replace("\xa0", " ") for text in self.box.locator("select option").all_text_contents()]


@pytest.fixture(scope="module")
def panel(page): return Panel(page, 0)


def eventually(happened, seconds=60):
    "Wait until something is so."
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.1)


def grows(panel, *numbers):
    "Wait until pictures have changed twice."
    seen = [panel.pictures()]
    def changed():
        seen.append(panel.pictures())
        return all(len({pictures[number] for pictures in seen}) > 2 for number in numbers)
    eventually(changed)


def test_the_line_about_the_precision_follows_use_amp(panel, shoot):
    panel.says("Next run in:.*FP16 mixed precision.*auto means on for mini")
    shoot(panel.box, "1_before")
    panel.press("off")
    panel.says("Next run in:.*FP32.*use_amp is false")
    panel.says("Not used: .*growth interval.*FP32 has no scaler")
    assert panel.box.get_by_label("growth interval", exact=True).is_disabled()


def test_training_draws_while_the_notebook_answers(page, panel, shoot):
    panel.fill("epochs", 5000)
    panel.press("Train")
    panel.says(r"run 1 .FP32. · epoch \d+ of 5000 · [\d.]+ steps/s · \d+:\d\d.* left · peak memory .* · 0 steps skipped")
    answers = page.get_by_text(ANSWERED)
    answer = answers.last.text_content()
    page.locator(".jp-CodeCell", has_text=ANSWER).last.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    eventually(lambda: answers.last.text_content() != answer, 10)
    assert panel.button("Stop").is_enabled(), "training was over before the notebook answered"
    panel.box.scroll_into_view_if_needed()
    grows(panel, 0)  # the other figure says that FP32 has no scaler
    shoot(panel.box, "2_training")
    panel.press("Stop")
    panel.says("run 1 .FP32. · stopped", 10)


def test_a_long_run_is_stopped_and_goes_on_by_keyboard(panel, shoot):
    train = panel.button("Train")
    train.focus()
    train.press("Enter")
    panel.says(r"run 2 .FP32. · epoch ([2-9]|\d\d+) of 5000")
    panel.press("Stop")
    stopped = int(panel.says(r"run 2 .FP32. · stopped, epoch (\d+) of 5000", 10)[1])
    go_on = panel.button("Go on")
    go_on.focus()
    go_on.press("Space")
    eventually(lambda: int(panel.says(r"run 2 .FP32. · epoch (\d+) of 5000")[1]) > stopped)
    panel.press("Stop")
    panel.says("run 2 .FP32. · stopped", 10)
    shoot(panel.box, "3_stopped")
    for left in (1, 0):
        panel.press("Delete")
        panel.press("Really?")
        eventually(lambda: len(panel.runs()) == left)


def test_amp_on_cpu_stands_beside_fp32(panel, shoot):
    panel.fill("epochs", 15)
    panel.press("Train")
    panel.says("run 3 .FP32. · finished, epoch 15 of 15", 120)
    assert "finished, loss" in panel.runs()[0]
    shoot(panel.box, "4_fp32")
    panel.press("Reset")
    panel.press("on")
    panel.says("Next run in:.*FP16 mixed precision")
    panel.fill("epochs", 5000)
    panel.press("Train")
    grows(panel, 0, 1)
    panel.says("run 4 .FP16. · epoch .* · [1-9][0-9]* steps skipped", 120)
    panel.press("Stop")
    panel.says("run 4 .FP16. · stopped, epoch .* · [1-9][0-9]* steps skipped")
    assert [run.split()[3] for run in panel.runs()] == ["FP32", "FP16"]
    panel.says("The scale is")
    both = panel.pictures()
    panel.box.get_by_label("loss on a log scale").check()
    eventually(lambda: panel.pictures()[0] != both[0])
    panel.fill("name", "sixteen bits")
    eventually(lambda: panel.runs()[1].startswith("● sixteen bits:"))
    panel.box.get_by_label("show its curve").uncheck()
    eventually(lambda: panel.runs()[1].startswith("○"))
    panel.box.get_by_label("show its curve").check()
    eventually(lambda: panel.runs()[1].startswith("●"))
    shoot(panel.box, "5_both")


def test_export_writes_a_folder(panel, lab, shoot):
    panel.press("Export")
    panel.says("Exported to dashboard.sixteen bits")
    exported = lab[1] / "nbs" / "dashboard" / "sixteen bits"
    assert {file.name for file in exported.iterdir()} == {"config.yaml", "curves.png", "curves.svg", "history.csv", "history.json", "model_last.pt"}
    assert (exported / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_panel_fits_into_900_pixels(page, panel, shoot):
    width = panel.box.bounding_box()["width"]
    page.set_viewport_size({"width": int(1280 - width + 900), "height": 1600})
    too_wide = page.evaluate("""box => [...box.querySelectorAll('*')].filter(each => each.getBoundingClientRect().right > box.getBoundingClientRect().right + 1).map(each => each.className)""", panel.box.element_handle())
    shoot(panel.box, "6_narrow")
    page.set_viewport_size({"width": 1280, "height": 1600})
    assert not too_wide


def test_a_divergence_shows_error_and_advice_and_the_panel_stays_usable(page, shoot):
    panel = Panel(page, 1)
    panel.press("Train")
    panel.says(r"Error in run 1: Training diverged in epoch \d")
    panel.says("Halve learning_rate")
    shoot(panel.box, "7_diverged")
    assert panel.button("Train").is_enabled() and "diverged" in panel.runs()[0]
    panel.press("full")
    panel.says("use_amp auto means off for full")


def test_voila_shows_the_panel_without_code(browser, serve, tmp_path, shoot):
    pytest.importorskip("voila", reason="Voilà is not installed: pip install -e '.[dev]'")
    notebook = json.loads((NOTEBOOKS / "05_dashboard.ipynb").read_text(encoding="utf-8"))
    notebook["cells"] = [cell for cell in notebook["cells"] if cell["id"] != "export"]  # it belongs in the project's folder
    (tmp_path / "page.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    with serve(["voila", "page.ipynb", "--no-browser", "--Voila.ip=127.0.0.1"], tmp_path) as address:
        page = browser.new_page(viewport={"width": 1000, "height": 1600})
        page.goto(address, timeout=120 * SECONDS)
        train = page.get_by_role("button", name="Train").last
        train.wait_for(timeout=60 * SECONDS)
        assert page.get_by_text("import ipywidgets").count() == 0
        train.click()
        page.get_by_text(re.compile(r"run 4 .FP16. · finished, epoch 4 of 4")).last.wait_for(timeout=60 * SECONDS)
        assert page.get_by_text("There was an error when executing").count() == 0
        page.locator(".jp-OutputArea-output", has=train).last.scroll_into_view_if_needed()
        shoot(page, "8_voila")
        page.close()
