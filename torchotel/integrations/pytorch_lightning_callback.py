"""The callback for those who import `pytorch_lightning`."""

from pytorch_lightning import Callback

from torchotel.integrations.lightning import LightningEvents


class TorchotelCallback(LightningEvents, Callback):
    """Tell of each step."""
