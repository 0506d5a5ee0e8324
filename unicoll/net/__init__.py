"""Who may talk to a job, and how: authentication, framed connections, interfaces, stores, the control plane."""
