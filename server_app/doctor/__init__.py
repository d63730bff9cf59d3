"""``oneshot doctor``: whether a machine is fit to be the server, or a node, of a deployment.

A check is a small function that returns findings: the state, the requirement, and the remedy. It changes nothing and
ends no process. :mod:`server_app.doctor.roles` lists the checks of each role.
"""
