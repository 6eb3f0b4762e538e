"""Questions to the demo, each with the key of pydoc_data.topics that answers it."""

from __future__ import annotations

# Written before the tuning of the ranking began.
BEFORE_TUNING = (
    ("how to catch an exception and clean up with finally", "try"),
    ("format a float with two decimal places", "formatstrings"),
    ("define a function with default parameter values", "function"),
    ("what does the yield expression do in a generator", "yield"),
    ("operator precedence table", "operator-summary"),
    ("how does slicing a sequence work", "slicings"),
    ("set a breakpoint and step through code in the debugger", "debugger"),
    ("how are modules found and loaded by import", "import"),
    ("raise an exception from another exception", "raise"),
    ("context manager enter and exit methods", "context-managers"),
    ("split a string into a list of words", "string-methods"),
    ("create an anonymous function", "lambda"),
    ("difference between global and nonlocal variables", "nonlocal"),
    ("remove an item from a dictionary", "typesmapping"),
    ("loop with else clause over the items of a sequence", "for"),
    ("bitwise shift left by n bits", "shifting"),
)

# Written after the tuning was finished.
AFTER_TUNING = (
    ("exit from the nearest enclosing loop", "break"),
    ("customize what happens when an attribute is set or deleted on an instance", "attribute-access"),
    ("read a value out of a dictionary and give a default if the key is missing", "typesmapping"),
    ("how do triple quoted strings handle newlines", "strings"),
    ("precision and width of a number in a replacement field", "formatstrings"),
    ("make a class usable as a container with __contains__", "sequence-types"),
    ("what is the result of dividing two integers and the remainder", "binary"),
    ("variable annotations without a value", "assignment"),
    ("move up and down the stack frame while debugging", "debugger"),
    ("run code only if no exception was raised in the try block", "try"),
)
