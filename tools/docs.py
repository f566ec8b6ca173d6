"""Build the docs site from the notebooks, without Quarto.

    python tools/docs.py            build it into the folder that settings.ini names (_docs)
    python tools/docs.py --check    build it in a temporary folder only

The pages are nbdev's own (what `nbdev_docs` hands to Quarto), rendered by smalldocs from the same `_quarto.yml`.
Exits 1 when a page does not build, a link or an anchor leads nowhere, or the sidebar and the notebooks differ.
Everything happens in a copy: of the working tree only the built site changes.
"""
import argparse
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
NUMBERED = re.compile(r"\b\d+[a-z]?_(\w[\w-]*\.ipynb)")
NUMBERED_LINK = re.compile(r"\]\((\./)?\d+[a-z]?_(\w[\w-]*\.ipynb)")
GENERATED = ["_quarto.yml", "nbdev.yml", "sidebar.yml", ".ipynb_checkpoints", "__pycache__"]


def without_numbers(text):
    """Text with page names as nbdev gives them: 00_config.ipynb is config.ipynb."""
    return NUMBERED.sub(r"\1", text)


def copy_project(project):
    """The part of the tree that the docs are made of, modules exported anew, so that pages and code agree."""
    for name in ("nbs", "autowzry_agent"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns(*GENERATED))
    shutil.copy(ROOT / "settings.ini", project)
    from nbdev.doclinks import nbdev_export

    nbdev_export(path=project / "nbs")


def process_notebooks(project):
    """Run nbdev's processors: symbols become links, exported cells their documentation. Returns the folder of pages."""
    from nbdev.doclinks import NbdevLookup
    from nbdev.serve import proc_nbs

    if "autowzry_agent" not in NbdevLookup().entries:
        sys.exit('symbols would not become links, because the project is not installed: pip install -e ".[dev]"')
    try:
        return proc_nbs(n_workers=0)
    except Exception as error:  # whatever a cell may raise; nbdev says which one it was
        sys.exit(f"{error}\n{type(error.__cause__).__name__}: {error.__cause__}" if error.__cause__ else f"{type(error).__name__}: {error}")


def stage_pages(pages, site):
    """Lay the processed notebooks out for smalldocs: nbdev's page names, links between pages relative."""
    from nbdev.config import get_config

    config = get_config()
    home = f"{config.doc_host}{config.doc_baseurl}/"
    for source in sorted(path for path in pages.rglob("*") if path.is_file()):
        target = site / without_numbers(source.relative_to(pages).as_posix())
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".ipynb":
            target.write_text(json.dumps(staged(json.loads(source.read_text(encoding="utf-8")), home)), encoding="utf-8")
        else:
            shutil.copy(source, target)
    (site / "_quarto.yml").write_text(without_numbers((ROOT / "_quarto.yml").read_text(encoding="utf-8")), encoding="utf-8")


def relative_links(text, home):
    """Markdown whose links to pages of this site, by notebook or by web address, lead to the page beside it."""
    return NUMBERED_LINK.sub(r"](\2", "".join(text)).replace(f"]({home}", "](")


def staged(nb, home):
    """A processed notebook in the form that smalldocs reads."""
    for cell in nb["cells"]:
        if cell["cell_type"] == "raw":
            cell["source"] = [line for line in cell["source"] if not line.startswith("output-file:")]
        if cell["cell_type"] == "markdown":
            cell["source"] = relative_links(cell["source"], home)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "text/markdown" in data:
                data["text/markdown"] = relative_links(data["text/markdown"], home)
    return nb


def smalldocs(action, *options):
    """Run smalldocs on a folder; what it has to say goes to the terminal."""
    return subprocess.run([sys.executable, "-m", "smalldocs.cli", action, *map(str, options)]).returncode == 0


class Page(HTMLParser):
    """The ids and the links of a page."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = {""}, []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        self.links += [attributes[key] for key in ("href", "src") if attributes.get(key)]


def broken_links(site):
    """Links of the built pages that lead to no file or to no place on a page."""
    pages = {path.relative_to(site).as_posix(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(parts.path))) if parts.path else name
            if not (site / target).exists():
                found.append(f"{name}: the link {link} leads to no file")
            elif target in pages and unquote(parts.fragment) not in pages[target].ids:
                found.append(f"{name}: the link {link} leads to no place on {target}")
    return found


def sidebar_problems():
    """Notebooks that the sidebar leaves out, and names in it that are no notebook."""
    notebooks = {path.name for path in (ROOT / "nbs").glob("[!_.]*.ipynb")}
    listed = set(re.findall(r"[\w-]+\.ipynb", (ROOT / "_quarto.yml").read_text(encoding="utf-8")))
    missing = [f"_quarto.yml: the sidebar leaves out {name}" for name in sorted(notebooks - listed)]
    return missing + [f"_quarto.yml: the sidebar names {name}, which nbs/ does not have" for name in sorted(listed - notebooks)]


def build(folder):
    """Build the site in this folder; returns where it lies and what is wrong with it."""
    project, site = folder / "project", folder / "site"
    project.mkdir()
    os.chdir(project)  # nbdev finds its settings from here
    sys.path.insert(0, str(project))
    copy_project(project)
    stage_pages(process_notebooks(project), site)
    problems = sidebar_problems()
    if not smalldocs("render", "--strict", "--quiet", site) or not smalldocs("check", site):
        problems.append("smalldocs has something to say about the pages; see above")
    return site / "_docs", problems + broken_links(site / "_docs")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="keep nothing of what is built")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            built, problems = build(Path(folder))
            if not problems and not args.check:
                shutil.rmtree(ROOT / "_docs", ignore_errors=True)
                shutil.move(built, ROOT / "_docs")
        finally:
            os.chdir(ROOT)  # a folder in use cannot be removed on Windows
    for problem in problems:
        print(problem)
    if problems:
        sys.exit(1)
    print("the docs build" if args.check else f"the docs are in {ROOT / '_docs'}")


if __name__ == "__main__":
    main()
