"""The client's part of INT8: the ranges of its model's activations on its own examples, sent with its upload.

Quantised activations need a range per layer, and only the client has the data to measure it::

    from oneshot_fl.client.calibration import calibrate

    content["upload"] = upload_facts(client="hospital-a", ranges=calibrate(model, batches))
"""

from __future__ import annotations

from ..uploads.quantization import calibrate as calibrate
