"""One job: started, watched, resumed, reported."""
