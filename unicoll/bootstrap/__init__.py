"""Starting a job: launcher environments, rendezvous, store locations, joining and leaving."""
