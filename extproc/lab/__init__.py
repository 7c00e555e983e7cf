"""The room that imitates: an engine model, a fake pod that runs it in real time.

A client of `core`: what is judged here ships unchanged.
"""
