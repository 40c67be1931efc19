"""Jobs of other systems as people start them, and the configuration that each starts with.

words        the command line of one job: its program, its options, Hydra's words
programs     verl's programs: the kind of file that configures each, and where it is
shell        the jobs that a shell script starts; `shell_text` takes shell apart
reading      from a file, of whatever kind, to the configuration that is converted
"""
