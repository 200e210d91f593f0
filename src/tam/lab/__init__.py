"""The lab: experiments on the optimizers and their reports. The library never imports it."""
