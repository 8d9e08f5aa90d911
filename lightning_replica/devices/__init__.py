"""What differs from device to device, behind one interface."""
