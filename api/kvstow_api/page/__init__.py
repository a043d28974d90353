"""The status page: the service at a glance, in any browser, with nothing from elsewhere."""
