"""Says what is the matter where the package that is imported has no extension: mostly a checkout's, which hides an
installed one because Python was started in its folder.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

if find_spec(f"{__package__}._C") is None:
    raise ImportError(
        f"deep_kernels: {Path(__file__).parent} must hold a built extension, got none: run scripts/setup.sh if it is a "
        "checkout's, or leave that checkout to import an installed package"
    )
