"""The files of a checkpoint: manifest, index and data, their names, and what they ask of a disk or an object store.

Nothing here knows ranks: what saves and loads is beside this folder.
"""
