"""A release, made by steps that run on any machine, up to the upload.

`python -m release STEP...` runs steps one after another; `python -m release all` runs all of them,
as `make release-dry-run` does. `.github/workflows/release.yml` calls the same steps. Read
`steps.py` first.
"""
