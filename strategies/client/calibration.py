"""The client's part of INT8: what its model's layers give on its own examples, which goes with its upload.

Quantised activations need a range per layer, and only the client has the data to find it::

    from strategies.client.calibration import calibrate

    content["upload"] = upload_facts(client="hospital-a", ranges=calibrate(model, batches))
"""

from __future__ import annotations

from ..uploads.quantization import calibrate as calibrate
