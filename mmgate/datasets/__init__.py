"""The generated shapes data set, in COCO and in ADE20K form."""
