"""Every serving decision, taken by one deterministic core; standard library only.

Files are machinery, folders are menus: one policy, one file. Reading order: types.py, engine.py, step.py, and one file
per menu.
"""
