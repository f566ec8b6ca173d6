"""What every test runs under: no window for figures, nothing left over from `nbdev_test`, no time limit on an example."""
import os

from hypothesis import settings

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.pop("IN_TEST", None)

settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")
