"""Batch scripts: `job_options` has the user's wishes, `systems` each system's words, `render` the script, `sites` a centre's
defaults, `submission` the hand-over.
"""
