"""Tables, progress, timelines and pages, read from the files of a run."""
