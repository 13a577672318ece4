"""The pods and services of a job: informers, handlers, expectations, adoption, building."""
