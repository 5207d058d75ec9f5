"""The embedded stack: S3 (Swift), MLflow, Prefect and a worker on this machine, run by supervisor, everything under one folder.

settings   the home folder: ports, credentials, and the environment that leads to the services
swift      the S3 server: its own environment, configuration and rings
services   what each supervised process runs
control    supervisor: start it, talk to it, sweep what is left
health     waiting for an answer; who holds a port
serving    work pool and deployments of the Prefect server
stack      up, down, status
watch      takes the stack down when a given process ends (for tests)
"""
