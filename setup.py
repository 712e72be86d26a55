"""Maps the repository's folders to import names; all other metadata is in pyproject.toml.

`trace` is a standard-library module and `kernels` a Hub library, so neither folder may be
imported under its own name: see README, "Layout".
"""

from setuptools import find_packages, setup

FOLDERS = {"trace_kernels": "trace_kernels", "trace_kernels.device": "kernels", "trace_rl": "trace"}


def _packages() -> list[str]:
    found = []
    for name, folder in FOLDERS.items():
        found.append(name)
        found += [f"{name}.{sub}" for sub in find_packages(folder)]
    return sorted(set(found))


setup(packages=_packages(), package_dir=FOLDERS)
