"""Make README.md of nbs/index.ipynb.

    python tools/readme.py            write README.md
    python tools/readme.py --check    exit 1 when README.md is not what the notebook makes
"""
import argparse
import posixpath
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parent.parent
NOTICE = "<!-- Made of nbs/index.ipynb by tools/readme.py: edit the notebook. -->\n\n"
HIDDEN = re.compile(r"^#\|\s*(hide|default_exp|export[si]?|include:\s*false)\b", re.M)
DIRECTIVE = re.compile(r"^#\|.*\n?", re.M)
LINK = re.compile(r"(\]\()([^)\s#]+)")


def from_root(match):
    """A link of the notebook as it reads from the top level, where README.md lies."""
    start, target = match.groups()
    if re.match(r"\w+:|/", target):
        return match[0]
    return start + posixpath.normpath(f"nbs/{target}")


def visible(cell):
    """A cell as a reader sees it, or None when it is hidden."""
    if cell.cell_type == "raw" or (cell.cell_type == "code" and HIDDEN.search(cell.source)):
        return None
    if cell.cell_type == "markdown":
        cell.source = LINK.sub(from_root, cell.source)
        return cell
    cell.source = DIRECTIVE.sub("", cell.source)
    pictures = [mime for output in cell.outputs for mime in output.get("data", {}) if mime.startswith("image/")]
    if pictures:
        sys.exit(f"index.ipynb, cell {cell.id}: README.md cannot hold the picture in its output; link to a file instead")
    return cell


def readme():
    """The text of README.md."""
    nb = nbformat.reads((ROOT / "nbs" / "index.ipynb").read_text(encoding="utf-8"), as_version=4)
    nb.metadata.language_info = {"name": "python"}  # what the code blocks are marked with
    nb.cells = [cell for cell in map(visible, nb.cells) if cell]
    text, _ = MarkdownExporter().from_notebook_node(nb)
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return NOTICE + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare only")
    args = parser.parse_args()
    path, text = ROOT / "README.md", readme()
    if not args.check:
        path.write_text(text, encoding="utf-8", newline="\n")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        sys.exit("README.md is not what nbs/index.ipynb makes; mend it with: python tools/readme.py")


if __name__ == "__main__":
    main()
