"""The dashboard without a browser: its threads, its memory, what it says, and what it does not lose."""
import gc
import os
import sys
import threading
import time

import ipywidgets as widgets
import matplotlib
import numpy as np
import psutil
import pytest
import torch
from matplotlib.figure import Figure

from autowzry_agent import dashboard as module
from autowzry_agent.buffer import BufferDataError, TrainingBuffer
from autowzry_agent.config import Config, ConfigError
from autowzry_agent.dashboard import CONTROLS, Dashboard, DashboardError, Pace, TrainingRun, not_used, precision_line
from autowzry_agent.environment import LANE_ID, make_env, record, scripted_policy
from autowzry_agent.model import load_model
from autowzry_agent.trainer import History, Trainer

STUDY = {"use_amp": True, "amp_on_cpu": True}


@pytest.fixture(scope="module")
def buffer(): return record(make_env(LANE_ID), scripted_policy(), steps=300, frame_shape=(3, 32, 32), progress=False)


def small_config(**changes):
    "A run of a second."
    return Config(**{**dict(model_mode="mini", input_shape=(3, 32, 32), batch_size=4, num_epochs=2, steps_per_epoch=6, target_update_epochs=2,
        use_amp=False, device="cpu", learning_rate=5e-4), **changes})


@pytest.fixture
def open_dashboard(buffer, tmp_path):
    "Makes dashboards that are closed when the test is over."
    opened = []
    def open_one(evaluate=None, **changes):
        opened.append(Dashboard(small_config(**changes), buffer, evaluate, tmp_path / "exported"))
        return opened[-1]
    yield open_one
    for one in opened: one.close()


def at_work(): return [thread for thread in threading.enumerate() if thread.name == "autowzry dashboard"]


def until(happened, seconds=30):
    "Wait until something is so."
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def message(dashboard): return dashboard._message.value


# Training in the background

@pytest.mark.parametrize("precision", [{}, STUDY], ids=["FP32", "FP16"])
def test_a_run_is_what_the_trainer_makes_of_it(open_dashboard, buffer, precision):
    dashboard = open_dashboard(lambda model: 1.0, **precision)
    run = dashboard.start()
    assert dashboard.is_training and run.state == "running"
    assert dashboard.wait() is run and run.state == "finished" and not dashboard.is_training and not at_work()
    alone = Trainer(small_config(**precision), verbose=False)
    alone.train(buffer, lambda model: 1.0)
    np.testing.assert_array_equal(run.history.loss, alone.history.loss)
    np.testing.assert_array_equal(run.history.scale, alone.history.scale)
    assert run.history.scores == alone.history.scores == {1: 1.0, 2: 1.0}
    for name, value in dashboard.model.state_dict().items(): assert torch.equal(value, alone.best_model.state_dict()[name])
    assert dashboard.history is run.history


def test_a_stopped_run_goes_on_exactly(open_dashboard, buffer):
    dashboard = open_dashboard(num_epochs=3, steps_per_epoch=40)
    run = dashboard.start()
    until(lambda: run.progress[0] > 5)
    dashboard.stop()
    assert run.state == "stopped" and 5 < len(run.history.loss) < 120
    dashboard.go_on()
    dashboard.wait()
    np.testing.assert_array_equal(run.history.loss, Trainer(run.config, verbose=False).train(buffer).loss)
    with pytest.raises(DashboardError, match="run 1 can't go on"): dashboard.go_on()


def test_starting_stops_what_goes_on_here_and_in_other_dashboards(open_dashboard):
    first, second = open_dashboard(num_epochs=10_000), open_dashboard(num_epochs=10_000)
    one = first.start()
    two = first.start()
    assert (one.state, two.state, len(at_work())) == ("stopped", "running", 1)
    three = second.start()
    assert (two.state, three.state, len(at_work())) == ("stopped", "running", 1)
    second.stop()
    assert three.state == "stopped" and not at_work()


def test_closing_leaves_no_thread_and_no_widget(buffer):
    before = set(widgets.widget._instances)
    dashboard = Dashboard(small_config(num_epochs=10_000), buffer)
    run = dashboard.start()
    until(lambda: run.progress[0] > 0)
    dashboard.close()
    assert run.state == "stopped" and not at_work() and set(widgets.widget._instances) == before
    assert len(dashboard.history.loss) == run.progress[0] > 0


def test_ten_cycles_leave_threads_figures_and_memory_as_they_were(open_dashboard):
    process, dashboard = psutil.Process(), open_dashboard(num_epochs=10_000)
    def cycle():
        run = dashboard.start()
        until(lambda: run.progress[0] > 3)
        dashboard.stop()
        dashboard.delete()
    def state():
        gc.collect()
        alive = [type(each) for each in gc.get_objects()]
        return {"threads": threading.active_count(), "widgets": len(widgets.widget._instances), "figures": alive.count(Figure), "trainers": alive.count(Trainer)}
    for _ in range(3): cycle()
    before, memory = state(), process.memory_info().rss
    for _ in range(10): cycle()
    assert state() == before
    assert process.memory_info().rss - memory < 40 * 2**20, "a trainer of this size takes 10 MB, so ten of them would be 100"


@pytest.mark.skipif(sys.platform != "linux" or torch.get_num_threads() < 2, reason="only GNU's OpenMP on several cores has helpers to send home")
def test_starting_leaves_the_cores_to_the_training(open_dashboard):
    dashboard = open_dashboard(num_epochs=1000)
    torch.rand(2048, 2048) @ torch.rand(2048, 2048)
    before = psutil.Process().num_threads()
    run = dashboard.start()
    while run.progress[0] < 3: time.sleep(0.05)
    assert psutil.Process().num_threads() == before + 1  # the thread that trains; its helpers have taken the place of this one's


def test_two_hundred_drawings_leak_nothing(open_dashboard):
    process, dashboard = psutil.Process(), open_dashboard()
    dashboard.start()
    dashboard.wait()
    for _ in range(100): dashboard.draw()  # Python and the allocator take their room once: 30 MB in the first hundred, and 2 MB in the next
    gc.collect()
    figures = lambda: [type(each) for each in gc.get_objects()].count(Figure)
    kept, memory = figures(), process.memory_info().rss
    for _ in range(100):
        for kind in ("loss", "scale"): dashboard.draw((kind,))
    gc.collect()
    assert process.memory_info().rss - memory < 10 * 2**20
    assert figures() == kept


def test_drawing_goes_on_while_training_and_takes_its_share(open_dashboard, monkeypatch):
    dashboard, drawn, draw = open_dashboard(num_epochs=10_000), [], Dashboard.draw
    def counted(self, kinds=("loss", "scale")):
        started = time.perf_counter()
        draw(self, kinds)
        if threading.current_thread().name == "autowzry dashboard": drawn.append((kinds, time.perf_counter() - started))
    monkeypatch.setattr(Dashboard, "draw", counted)
    run = dashboard.start()
    until(lambda: len(drawn) >= 4, 60)
    dashboard.stop()
    kinds = [kind for (kind, *_), _ in drawn[:-1]]
    assert kinds[:4] == ["loss", "scale", "loss", "scale"], "the figures take turns"
    pace = Pace(module.DRAWING_SHARE)
    with pace.measured(): time.sleep(0.02)
    assert not pace.is_due() and 0.4 < pace._due - time.perf_counter() < 5
    assert run.progress[0] > 0


def test_a_drawn_history_is_not_written_to_any_more(open_dashboard):
    dashboard = open_dashboard(num_epochs=10_000)
    run = dashboard.start()
    until(lambda: len(run.history.loss) > 0)
    seen = run.history
    lengths = [len(value) for value in vars(seen).values() if isinstance(value, (np.ndarray, list))]
    until(lambda: run.history is not seen and len(run.history.epoch_loss) > len(seen.epoch_loss))
    assert [len(value) for value in vars(seen).values() if isinstance(value, (np.ndarray, list))] == lengths
    assert len({len(seen.loss), len(seen.scale), len(seen.epoch), len(seen.step_skipped)}) == 1
    dashboard.stop()


# What goes wrong

def test_a_divergence_is_told_and_the_panel_goes_on(open_dashboard):
    dashboard = open_dashboard(learning_rate=1e20)
    dashboard.start()
    run = dashboard.wait()
    assert run.state == "diverged" and "Training diverged in epoch 1" in message(dashboard) and 'role="alert"' in message(dashboard)
    assert "halve the learning rate (1e+20 to 5e+19)" in message(dashboard) and "PROBLEM" in dashboard._diagnosis.value
    assert all(value.isfinite().all() for value in dashboard.model.state_dict().values())
    dashboard._controls["learning_rate"].value = 1e-4
    assert not dashboard._train.disabled
    dashboard._train.click()
    dashboard.wait()
    assert dashboard.selected.state == "finished" and not message(dashboard)
    dashboard.select(run)
    assert "Training diverged" in message(dashboard)


def test_an_error_of_the_users_own_function_is_one_sentence(open_dashboard):
    def evaluate(model): raise ZeroDivisionError("division\nby <zero>")
    dashboard = open_dashboard(evaluate)
    dashboard.start()
    run = dashboard.wait()
    assert (run.state, run.error) == ("failed", "ZeroDivisionError: division by <zero>") and "in evaluate" in run.details
    assert "division by &lt;zero&gt;" in message(dashboard) and not at_work() and len(run.history.loss) == 6
    dashboard.evaluate = None
    dashboard.start()
    assert dashboard.wait().state == "finished"


def test_a_buffer_that_does_not_fit_is_refused_at_once(buffer):
    before = len(widgets.widget._instances)
    with pytest.raises((BufferDataError, ConfigError), match="5"): Dashboard(small_config(num_actions=5), buffer)
    with pytest.raises(ConfigError, match="cuda:77"): Dashboard(small_config(device="cuda:77"), buffer)
    assert len(widgets.widget._instances) == before


# Controls

def test_every_control_has_its_setting_and_changes_it(open_dashboard):
    dashboard = open_dashboard(use_amp=None)
    changes = {"use_amp": "off", "amp_dtype": "bfloat16", "amp_on_cpu": True, "model_mode": "full", "learning_rate": 1e-3, "batch_size": 16, "num_epochs": 7,
        "init_scale": 1024.0, "growth_interval": 5, "double_dqn": True, "seed": 3}
    assert set(changes) == set(CONTROLS) == set(dashboard._controls)
    assert dashboard.config == small_config(use_amp=None)
    for name, value in changes.items(): dashboard._controls[name].value = value
    assert dashboard.config == small_config(**{**changes, "use_amp": False})
    dashboard._reset.click()
    assert dashboard.config == small_config(use_amp=None) and dashboard.config.use_amp_automatic
    assert all(control.tooltip for control in dashboard._controls.values())


def test_values_that_a_slider_can_not_show_stay_as_they_are(open_dashboard):
    odd = dict(learning_rate=3.3333e-9, init_scale=3.7e30, seed=2**62, growth_interval=1, batch_size=2)
    dashboard = open_dashboard(**odd)
    assert dashboard.config == small_config(**odd)
    dashboard._controls["seed"].value = 5
    assert dashboard.config == small_config(**{**odd, "seed": 5})


def test_auto_follows_the_mode(open_dashboard):
    dashboard = open_dashboard(use_amp=None, amp_on_cpu=True)
    assert dashboard.config.use_amp and "FP16 mixed precision (use_amp auto means on for mini" in dashboard._precision_line.value
    dashboard._controls["model_mode"].value = "full"
    assert not dashboard.config.use_amp and "FP32 (use_amp auto means off for full" in dashboard._precision_line.value
    dashboard._controls["use_amp"].value = "on"
    assert dashboard.config.use_amp and "auto" not in dashboard._precision_line.value


@pytest.mark.parametrize("changes, disabled", [
    ({}, {"init_scale", "growth_interval", "amp_dtype", "amp_on_cpu"}),
    ({"use_amp": True}, {"init_scale", "growth_interval", "amp_dtype"}),
    (STUDY, set()),
    ({**STUDY, "amp_dtype": "bfloat16"}, {"init_scale", "growth_interval"}),
    ({**STUDY, "use_target_network": False}, {"double_dqn"}),
])
def test_what_changes_nothing_is_disabled_with_its_reason(open_dashboard, changes, disabled):
    dashboard = open_dashboard(**changes)
    assert {name for name, control in dashboard._controls.items() if control.disabled} == disabled
    for name in disabled: assert CONTROLS[name][0] in dashboard._unused_line.value


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a card the answers are its own")
def test_the_promise_about_a_card_that_is_not_here(monkeypatch):
    "As if there were a card: the same line as the trainer's gate would give."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card = torch.device("cuda", 0)
    assert not_used(small_config(use_amp=True, amp_on_cpu=True), card) == {"amp_on_cpu": "training runs on the graphics card"}
    monkeypatch.setattr(module, "Precision", lambda config, device: type("", (), {"enabled": True})())
    assert precision_line(small_config(use_amp=True), card) == "FP16 mixed precision (on cuda:0)"


# Runs

@pytest.fixture
def with_runs(open_dashboard):
    "A dashboard with two finished runs."
    dashboard = open_dashboard(num_epochs=1)
    for _ in range(2):
        dashboard.start()
        dashboard.wait()
    return dashboard


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")  # where there is no Chinese font
def test_runs_are_selected_renamed_hidden_and_deleted(with_runs):
    first, second = with_runs.runs
    with_runs.select("run 1")
    assert with_runs.model is first.model and with_runs.history is first.history and with_runs._list.value == 0
    with_runs.rename(" 第一次 ")
    assert first.name == "第一次" and "第一次" in with_runs._list.options[0][0]
    with_runs._is_shown.value = False
    assert not first.is_shown and with_runs._list.options[0][0].startswith("○")
    with_runs._delete.click()
    assert len(with_runs.runs) == 2
    with_runs._delete.click()
    assert with_runs.runs == [second] and with_runs.selected is second
    with_runs.delete()
    assert with_runs.selected is with_runs.model is with_runs.history is None and with_runs._export.disabled
    with pytest.raises(DashboardError, match="no run yet"): with_runs.export()


@pytest.mark.parametrize("name, told", [("", "a name of 1 to 60"), ("x" * 61, "a name of 1 to 60"), ("run 2", "another run is called 'run 2'")])
def test_a_name_that_can_not_be_is_told_and_put_back(with_runs, name, told):
    with_runs.select("run 1")
    with_runs._name.value = name
    assert told.replace("'", "&#x27;") in message(with_runs) and with_runs._name.value == "run 1"


def test_a_run_that_goes_on_is_neither_deleted_nor_exported(open_dashboard):
    dashboard = open_dashboard(num_epochs=10_000)
    run = dashboard.start()
    assert dashboard._delete.disabled and dashboard._export.disabled and dashboard._train.disabled and not dashboard._stop.disabled
    for action in (dashboard.delete, dashboard.export):
        with pytest.raises(DashboardError, match="stop it first"): action()
    dashboard.stop()
    assert run in dashboard.runs and not dashboard._delete.disabled and not dashboard._go_on.disabled


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")  # where there is no Chinese font
@pytest.mark.parametrize("name", ["ordinary", "a/b\\c:d*e?", "..", "对局 一", "x" * 60])
def test_exports_have_folders_of_their_own(with_runs, name):
    with_runs.rename(name)
    folders = [with_runs.export() for _ in range(3)]
    assert len(set(folders)) == 3 and all(folder.parent == with_runs.folder for folder in folders)
    for folder in folders:
        assert {file.name for file in folder.iterdir()} == {"config.yaml", "curves.png", "curves.svg", "history.csv", "history.json", "model_last.pt"}
        np.testing.assert_array_equal(History.load(folder).loss, with_runs.history.loss)
        assert Config.from_yaml(folder / "config.yaml") == with_runs.selected.config
    for key, value in load_model(folders[0] / "model_last.pt").state_dict().items(): assert torch.equal(value, with_runs.model.state_dict()[key])


def test_an_export_that_can_not_be_written_is_told(with_runs, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with_runs.folder = tmp_path / "file"
    with_runs._export.click()
    assert "Error" in message(with_runs) and (tmp_path / "file").read_text(encoding="utf-8") == "in the way"


def test_pyplot_is_left_alone(with_runs):
    import matplotlib.pyplot as plt
    assert plt.get_fignums() == [] and matplotlib.rcParams["backend"]
    assert isinstance(with_runs.runs[0], TrainingRun) and "run 2" in repr(with_runs.runs[1])
    assert repr(with_runs) == "Dashboard: 2 runs, not training"
    assert "application/vnd.jupyter.widget-view+json" in with_runs._repr_mimebundle_()
