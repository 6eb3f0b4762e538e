"""Adapters for other libraries, each imported by itself: none of them is needed by the package."""
