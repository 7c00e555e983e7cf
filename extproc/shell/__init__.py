"""The room that translates: one outside thing per file, no decisions.

Apart from a short list in the architecture test, shell modules do not import each other; `app`
connects them through core objects and plain callables.
"""
