"""What our command lines add to mmengine's Runner."""
