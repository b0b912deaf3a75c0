"""One run of the main job: planned, assembled, trained, recorded."""
