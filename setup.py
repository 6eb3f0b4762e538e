"""Builds deep_kernels._C: LibTorch and pybind11 only, no CUDA toolkit."""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).parent
SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))

# Two link jobs per core would not be faster, and memory per job is about 1 GB.
os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))

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
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
