"""Batch scripts: what a job asks for, in the words of each batch system, and the job that comes of it.

`options` is what a user asks for, `systems` what each batch system calls it, `render` the script, `sites` a centre's defaults, and
`submission` hands the script over. The templates lie in `templates`.
"""
