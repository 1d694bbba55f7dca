"""What a trained flow answers: scores and draws of any number of rows, hidden parts filled in."""
