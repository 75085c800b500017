"""What the layers of the papers derive from: dense, map and deformable attention, and how gates start."""
