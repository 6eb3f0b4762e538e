"""Builds deep_kernels._C: LibTorch and pybind11 only, no CUDA toolkit."""

import os
import shutil
import sysconfig
from pathlib import Path

import torch
from setuptools import setup
from setuptools.command.build_py import build_py
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent
SOURCES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.cpp"))

# One job per core: more would not be faster, and a job takes up to 1 GB.
os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))


class BuildPackage(build_py):
    """Copies the package into an empty folder, so that no file of an earlier build gets into a wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "deep_kernels", ignore_errors=True)
        super().run()


class BuildObjects(BuildExtension):
    """Keeps objects between runs: setuptools gives an editable install a new folder each time, which is a full
    build. One folder per Python and torch, whose headers differ."""

    def finalize_options(self) -> None:
        super().finalize_options()
        abi = sysconfig.get_config_var("SOABI")
        self.build_temp = str(ROOT / "build" / f"temp-{abi}-torch-{torch.__version__}")


setup(
    ext_modules=[
        CppExtension(
            "deep_kernels._C",
            SOURCES,
            include_dirs=[str(ROOT / "csrc"), str(ROOT / "deep_kernels" / "include")],
            define_macros=[("FMT_HEADER_ONLY", "1")],  # torch ships the headers, not the symbols
            extra_compile_args=[
                "-std=c++20",
                "-O3",  # g++ 12 vectorizes little below it, and the CPU backend lives on that
                "-fopenmp",  # makes at::parallel_for parallel; not linked: the symbols are torch's libgomp's
                "-g0",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-Wno-unused-parameter",  # of torch's headers
                "-ffp-contract=off",  # a fused multiply-add is written as such
            ],
            extra_link_args=["-ldl"],
        )
    ],
    cmdclass={"build_py": BuildPackage, "build_ext": BuildObjects.with_options(use_ninja=True)},
)
