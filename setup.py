"Packaging: everything it needs to know stands in settings.ini, which nbdev reads too."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

settings = ConfigParser(delimiters=["="])
settings.read("settings.ini", encoding="utf-8")
cfg = settings["DEFAULT"]

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=Path("README.md").read_text(encoding="utf-8") if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    project_urls={"Documentation": cfg["doc_host"] + cfg["doc_baseurl"]},
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    keywords=cfg["keywords"].split(),
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Framework :: Jupyter",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
    ],
    packages=find_packages(include=["autowzry_agent", "autowzry_agent.*"]),
    package_data={"autowzry_agent": ["*.yaml"]},
    python_requires=f">={cfg['min_python']}",
    install_requires=cfg["requirements"].split(),
    extras_require={"dev": cfg["dev_requirements"].split(), "atari": cfg["atari_requirements"].split(), "voila": cfg["voila_requirements"].split()},
    entry_points={
        "console_scripts": cfg["console_scripts"].split(),
        "nbdev": [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"],
    },
    zip_safe=False,
)
