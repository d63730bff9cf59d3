"""``oneshot doctor``: whether a machine is fit to be the server, or a node, of a deployment.

A check is a small function that returns findings: what was found, what is needed, what to do. It changes nothing and
ends nothing. Which checks a role has stands in :mod:`server_app.doctor.roles`.
"""
