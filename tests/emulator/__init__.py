"""A host emulator of the package's kernels; see docs/emulator.md."""

from .build import CompilerMissing
from .driver import Emulator, EmulatorError, installed

__all__ = ["CompilerMissing", "Emulator", "EmulatorError", "installed"]
