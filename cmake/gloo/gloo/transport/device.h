#pragma once
#include <gloo/names.h>
