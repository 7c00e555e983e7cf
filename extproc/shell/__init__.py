"""The room that translates: one outside thing per file, no decisions.

Shell modules do not import each other (`server` and `codec` aside, and the small contract in
`rpc`); they meet in `app`, through core objects and plain callables.
"""
