"""Old names, for one version: what was here is in `llmdistill.students`."""
