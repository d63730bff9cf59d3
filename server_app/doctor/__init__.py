"""``oneshot doctor``: whether a machine is fit to be the server, or a node, of a deployment.

It looks at versions, TLS, keys, ports, disk and data. A check is a function that yields findings: the state, the
requirement, and the remedy. It changes nothing, downloads nothing and ends no process.
"""
