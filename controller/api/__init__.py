"""HTTP: the application, who may call, bounds on connections and bodies, routes."""
