"""What watches over a job: liveness, failure notices, reports of who is where."""
