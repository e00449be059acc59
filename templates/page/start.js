// The first script of the page: unpacks all others as one. The browser runs it because the content security policy has
// its hash, and would run no other.

import { unpacked } from "./load.js";

const others = document.createElement("script");
others.type = "module";
others.textContent = new TextDecoder().decode(await unpacked("scripts"));
document.head.append(others);
